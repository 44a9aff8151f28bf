"""A fabric in a process of its own: `python -m treadle.cli.background OPTIONS`, and how it is launched and listened to.

Owns the line protocol between launcher and background: events as JSON lines on standard output until it is up or has failed.
Spawned, never forked; it has a session of its own and outlives its launcher unless it is tethered.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict

from treadle.cli.child import tethered
from treadle.cli.events import Event
from treadle.cli.fabric import FabricRun
from treadle.cli.fabric_options import FabricOptions
from treadle.cli.process_mark import ProcessMark
from treadle.cli.run_folder import FabricState, RunFolder, home
from treadle.cli.supervisor import StartFailed, StopRequested
from treadle.cli.terminal import EXIT_INTERRUPTED
from treadle.contract.errors import TreadleError

ERRORS = "supervisor.stderr"


class BackgroundFabric:
    """The launcher's side: a background supervisor that was just spawned."""

    def __init__(self, options: FabricOptions, folder: RunFolder, *, tether: bool = False) -> None:
        self._folder = folder
        argv = [sys.executable, "-m", "treadle.cli.background", options.to_json()]
        folder.logs.mkdir(parents=True, exist_ok=True)
        self._errors = folder.logs / ERRORS
        # What the interpreter itself has to say, if it dies. Appended to: it may be another's, who is up and will refuse us.
        with self._errors.open("ab") as errors:
            self._errors_before = errors.tell()
            self._process = subprocess.Popen(
                tethered(argv) if tether else argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                env=os.environ | {"TREADLE_HOME": str(folder.home)}, start_new_session=True,
            )  # fmt: skip
        self.mark = ProcessMark.of(self._process.pid)

    def wait_up(self, listener: Callable[[Event], None]) -> FabricState:
        """Pass events on until it is up. StartFailed with its reason; KeyboardInterrupt stops it first."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            try:
                for line in lines:
                    said = json.loads(line)
                    if "event" in said:
                        listener(Event(**said["event"]))
                    elif "failed" in said:
                        self._process.wait()
                        raise StartFailed(said["failed"])
                    else:
                        return self._state()
            except KeyboardInterrupt:
                self.stop()
                raise
        code = self._process.wait()
        said_last = self._errors.read_bytes()
        ours = said_last[self._errors_before :] or said_last  # emptied once it had the lock: then all of it is ours
        words = ours.decode(errors="replace")[-2000:]
        raise StartFailed(f"the background supervisor ended with exit code {code} before it was up\n{words}".rstrip())

    def stop(self) -> int:
        """Ask for the drain and wait for its end; the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def _state(self) -> FabricState:
        state = self._folder.read()
        if state is None:
            raise StartFailed("the background supervisor stopped right after it was up; see `treadle logs supervisor`")
        return state


def main(argv: list[str]) -> int:
    """Run a fabric until SIGTERM; the exit code. argv: the options as JSON. The home comes from the environment."""
    run = FabricRun(RunFolder(home()), FabricOptions.from_json(argv[0]), _say_event)
    try:
        run.run(lambda state: _say_up(), _empty_errors)
    except StopRequested:
        _say({"failed": "stopped while it was starting"})
        return EXIT_INTERRUPTED
    except TreadleError as error:
        _say({"failed": str(error)})
        return 1
    except Exception:
        traceback.print_exc()  # goes to supervisor.stderr
        _say({"failed": f"a bug in the supervisor:\n{traceback.format_exc()}"})
        return 1
    return 0


def _empty_errors() -> None:
    """Drop what a supervisor before us left in the file that standard error goes to; ours from now on, as the lock is."""
    number = sys.stderr.fileno()
    if stat.S_ISREG(os.fstat(number).st_mode):
        os.ftruncate(number, 0)


def _say_event(event: Event) -> None:
    _say({"event": asdict(event)})


def _say_up() -> None:
    """The last line for the launcher; then nobody reads any more."""
    _say({"up": True})
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(null, sys.stdout.fileno(), inheritable=False)
    os.close(null)


def _say(document: dict[str, object]) -> None:
    try:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # the launcher left early; the fabric does not depend on it
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
