"""A TCP link between decode and prefill that a test can spoil: bytes change in flight, or it is cut."""

import socket
import threading


class Proxy:
    """Carries connections to `port`; the one to dial is `self.port`."""

    def __init__(self, port: int, flip_at: int | None = None) -> None:
        """`flip_at`: as for `flip`, from each connection's first byte on."""
        self._target = port
        self._plan = (0, flip_at)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._carried = 0
        self._flipped = 0
        self._connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    @property
    def carried(self) -> int:
        """Bytes that went towards the dialler so far."""
        with self._lock:
            return self._carried

    @property
    def flipped(self) -> int:
        """Bits that were turned."""
        with self._lock:
            return self._flipped

    @property
    def connections(self) -> int:
        """Connections that were dialled so far."""
        with self._lock:
            return self._connections

    def flip(self, at: int | None) -> None:
        """Turns one bit of the byte `at` (from 0) of what each connection carries towards the dialler from here on; None: of none."""
        with self._lock:
            self._plan = (self._plan[0] + 1, at)

    def close(self) -> None:
        """Cuts all connections and takes no more."""
        # Wakes the accept, which would else keep the socket open.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            _close(one)

    def _accept(self) -> None:
        while True:
            try:
                theirs, _ = self._listener.accept()
            except OSError:
                return
            try:
                ours = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                theirs.close()
                continue
            for one in (theirs, ours):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._connections += 1
                self._sockets |= {theirs, ours}
            threading.Thread(target=self._carry, args=(theirs, ours, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(ours, theirs, True), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, towards_dialler: bool) -> None:
        # Of this connection: the plan that was followed last, and the bytes that passed under it.
        followed = (0, 0)
        try:
            while data := source.recv(1 << 16):
                if towards_dialler:
                    data, followed = self._spoil(data, *followed)
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            _close(one)

    def _spoil(self, data: bytes, followed: int, passed: int) -> tuple[bytes, tuple[int, int]]:
        with self._lock:
            plan, at = self._plan
            if plan != followed:
                passed = 0
            self._carried += len(data)
            if at is not None and passed <= at < passed + len(data):
                self._flipped += 1
                changed = bytearray(data)
                changed[at - passed] ^= 0x10
                data = bytes(changed)
            return data, (plan, passed + len(data))


def _close(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
    one.close()
