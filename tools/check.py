"""Run lint and type checks beside the tests: `python tools/check.py PYTEST_ARGUMENT...`.

In: arguments of pytest. Out: the output of the tests as it comes; the output of any other part when
it fails; as the last line the parts that failed, the first failure first. The exit code is that of
the part that failed first, and 0 if none failed. No failure ends another part. Ctrl-C and SIGTERM
end all parts: the tests first clean up."""

import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

BIN = Path(sys.executable).parent
PARTS = {
    "format": ("ruff", "format", "--check"),
    "lint": ("ruff", "check"),
    "types": ("mypy",),
}
"""Parts that run one after the other, beside the tests."""


class Check:
    def __init__(self) -> None:
        self.failed: dict[str, int] = {}
        """The exit codes of the parts that failed, in the order of their failures."""
        self._interrupted = False
        self._lock = threading.Lock()
        self._tests: subprocess.Popen[bytes] | None = None
        self._beside: subprocess.Popen[str] | None = None

    def run(self, arguments: list[str]) -> int:
        # Ctrl-C in a terminal reaches the tests, which are in the same process group.
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGTERM, self._stop)
        self._tests = subprocess.Popen([BIN / "pytest", *arguments])
        others = threading.Thread(target=self._run_others)
        others.start()
        code = self._tests.wait()
        if code:
            self._note("tests", code)
        others.join()
        if self._interrupted:
            print("check: interrupted", file=sys.stderr)
            return 130
        if self.failed:
            print(f"check: failed: {', '.join(self.failed)}", file=sys.stderr)
        return abs(next(iter(self.failed.values()), 0))

    def _note(self, part: str, code: int) -> None:
        with self._lock:
            self.failed[part] = code

    def _run_others(self) -> None:
        for part, (program, *options) in PARTS.items():
            with self._lock:
                if self._interrupted:
                    return
                # Not in the process group of the terminal: `_stop` ends it.
                self._beside = subprocess.Popen(
                    [BIN / program, *options],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            if self._interrupted:  # since the last look
                self._beside.terminate()
            printed, _ = self._beside.communicate()
            if self._beside.returncode and not self._interrupted:
                self._note(part, self._beside.returncode)
                print(f"\ncheck: failed: {part}\n{printed}", end="", file=sys.stderr, flush=True)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        self._interrupted = True
        with suppress(ProcessLookupError):
            if self._beside is not None and self._beside.poll() is None:
                self._beside.terminate()
        if self._tests is not None and number == signal.SIGTERM:
            self._tests.terminate()


if __name__ == "__main__":
    sys.exit(Check().run(sys.argv[1:]))
