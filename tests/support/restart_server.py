"""A `rollout.server.restart_command`: ends the server of a pid file, and starts another at its address.

    python restart_server.py KIND PID_FILE [FOLDER]

With FOLDER the new one starts with those weights, and not with the current ones.
"""

import os
import signal
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from support.servers import start_process

if __name__ == "__main__":
    kind, pid_file = sys.argv[1], Path(sys.argv[2])
    folder = Path(sys.argv[3] if len(sys.argv) > 3 else os.environ["TEPO_NEMO_WEIGHTS"])
    if pid_file.exists():
        try:
            os.kill(int(pid_file.read_text()), signal.SIGKILL)
            time.sleep(0.2)
        except ProcessLookupError:
            pass
    process = start_process(kind, folder, urlsplit(os.environ["TEPO_NEMO_SERVER_URL"]).port)
    pid_file.write_text(str(process.pid))
