"""A router's side of KV events, with the libraries that routers use: subscribes, then asks for what it missed."""

import json
import sys

import msgspec
import zmq

publisher, replays, topic = sys.argv[1:]
context = zmq.Context()
events = context.socket(zmq.SUB)
events.connect(f"tcp://{publisher}")
events.setsockopt_string(zmq.SUBSCRIBE, topic)
missed = context.socket(zmq.DEALER)
missed.connect(f"tcp://{replays}")
for socket in (events, missed):
    socket.setsockopt(zmq.RCVTIMEO, 30_000)


def shown(number: bytes, payload: bytes) -> list:
    return [int.from_bytes(number, "big", signed=True), msgspec.msgpack.decode(payload) if payload else None]


for line in sys.stdin:
    words = line.split()
    if words[0] == "hear":
        heard_topic, number, payload = events.recv_multipart()
        assert heard_topic == topic.encode(), heard_topic
        print(json.dumps(shown(number, payload)), flush=True)
    else:
        missed.send_multipart([b"", int(words[1]).to_bytes(8, "big")])
        answers = []
        while not answers or answers[-1][0] != -1:
            empty, heard_topic, number, payload = missed.recv_multipart()
            assert empty == b"" and heard_topic == (topic.encode() if payload else b"")
            answers.append(shown(number, payload))
        print(json.dumps(answers), flush=True)
