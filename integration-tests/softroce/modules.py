"""Copies kernel modules with what they need: modules.py MODULES_FOLDER TARGET NAME...

TARGET/order lists them in the order in which they load.
"""

import os
import shutil
import sys

folder, target, wanted = sys.argv[1], sys.argv[2], sys.argv[3:]
needs = {}
with open(os.path.join(folder, "modules.dep")) as lines:
    for line in lines:
        path, needed = line.rstrip("\n").split(":")
        needs[path] = needed.split()
by_name = {os.path.basename(path).split(".ko")[0].replace("-", "_"): path for path in needs}
order = []


def add(path):
    if path not in order:
        for needed in needs[path]:
            add(needed)
        order.append(path)


for name in wanted:
    if name not in by_name:
        sys.exit(f"this kernel has no module {name}")
    add(by_name[name])
for path in order:
    shutil.copy(os.path.join(folder, path), target)
with open(os.path.join(target, "order"), "w") as out:
    out.writelines(os.path.basename(path) + "\n" for path in order)
