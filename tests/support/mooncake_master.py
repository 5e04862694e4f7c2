"""`mooncake_master` and processes that give memory to its pool, for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from kvferry.pool.mooncake import MooncakeStoreConfig
from vllm_engines import free_port
from waiting import wait_until

_HOLD = """
import sys, time
from kvferry.pool.mooncake import MooncakeStore
from kvferry.pool.mooncake import MooncakeStoreConfig
store = MooncakeStore(MooncakeStoreConfig(
    sys.argv[1], local_hostname="127.0.0.1", global_segment_size=int(sys.argv[2]),
    local_buffer_size=16 << 20))
print("ready", flush=True)
for line in sys.stdin:  # wipe
    store._client.remove_all(force=True)
    print("ready", flush=True)
store.close()
"""


class Master:
    """On ports of its own."""

    def __init__(self, log: Path) -> None:
        self.port, self._metrics, self._log = free_port(), free_port(), log
        self._holder: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        program = Path(sys.executable).with_name("mooncake_master")
        ports = [f"-rpc_port={self.port}", f"-metrics_port={self._metrics}"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, "-rpc_address=127.0.0.1", "-default_kv_lease_ttl=60000", *ports],
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(self._listens)
        except BaseException:
            self._process.kill()
            raise

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def hold(self, size: int) -> None:
        """A process that gives memory to the pool, and outlives the engines that write to it."""
        with self._log.open("ab") as log:
            self._holder = subprocess.Popen(
                [sys.executable, "-c", _HOLD, self.address, str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        self._wait_ready()

    def wipe(self) -> None:
        """Everything is evicted."""
        assert self._holder is not None and self._holder.stdin is not None
        self._holder.stdin.write(b"wipe\n")
        self._holder.stdin.flush()
        self._wait_ready()

    def _wait_ready(self) -> None:
        assert self._holder is not None and self._holder.stdout is not None
        for line in self._holder.stdout:  # the client prints, too
            if line.strip() == b"ready":
                return
        raise AssertionError(f"no memory for the pool:\n{self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._holder is not None:
            self._holder.kill()
            with self._holder:  # closes its pipes, and waits
                pass
        self.kill()

    def config(self, memory: int, buffer: int) -> MooncakeStoreConfig:
        return MooncakeStoreConfig(
            master_server_address=self.address,
            local_hostname="127.0.0.1",
            global_segment_size=memory,
            local_buffer_size=buffer,
        )

    def environment(self) -> dict[str, str]:
        """For engines that give no memory themselves."""
        return {
            "MOONCAKE_MASTER": self.address,
            "MOONCAKE_MODE": "standalone-store",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
            "MOONCAKE_LOCAL_BUFFER_SIZE": "64MB",
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
        }
