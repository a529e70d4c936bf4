"""Unpacks the kernel out of a bzImage: vmlinux.py BZIMAGE VMLINUX.

The bare ELF file boots by PVH, which spares an emulated processor six seconds of unpacking it.
Source: Documentation/x86/boot.rst, "payload_offset".
"""

import lzma
import struct
import sys
import zlib

image = open(sys.argv[1], "rb").read()
setup_sectors = image[0x1F1] or 4
offset, length = struct.unpack_from("<II", image, 0x248)
payload = image[(setup_sectors + 1) * 512 + offset :][:length]
if payload.startswith(b"\xfd7zXZ\0"):
    kernel = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(payload)
elif payload.startswith(b"\x1f\x8b"):
    kernel = zlib.decompressobj(31).decompress(payload)
else:
    sys.exit(f"the kernel is packed in a way that is not known here: it begins with {payload[:6]!r}")
if not kernel.startswith(b"\x7fELF"):
    sys.exit(f"what was packed is no ELF file: it begins with {kernel[:4]!r}")
with open(sys.argv[2], "wb") as out:
    out.write(kernel)
