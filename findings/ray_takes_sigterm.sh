#!/bin/bash
# Ray 2.60.0: ray.init() takes the SIGTERM handler that the program has set before, and leaves an alarm behind it.
#
# One is expected to be asked, or at least called: the program's handler is not called any more. Ray's ends the program
# by sys.exit; the handler of its C++ libraries, which comes first, has then set alarm(3), and nobody takes it back: a
# program whose atexit functions close or save for longer than three seconds is aborted (SIGABRT). Seen: "handled" is
# missing, and atexit finds an alarm of 2 or 3 seconds. Way round: signal.signal(SIGTERM, handler) again after ray.init.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check ray==2.60.0
cat >"$folder/program.py" <<'P'
import atexit, os, signal, sys, time
import ray

def handler(number, frame):
    print("handled", flush=True)

signal.signal(signal.SIGTERM, handler)
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, object_store_memory=80_000_000)
atexit.register(lambda: print("alarm" if signal.alarm(0) else "no alarm", flush=True))
if sys.argv[1] == "again":
    signal.signal(signal.SIGTERM, handler)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(1)
print("went on", flush=True)
P
cd "$folder"
status=0
for how in once again; do
    code=0
    output=$("$folder/venv/bin/python" program.py "$how" 2>/dev/null) || code=$?
    echo "ray 2.60.0, handler set $how: status $code, output: $(tr '\n' ' ' <<<"$output")"
    case $how in
        once) [[ $code != 0 && $output == alarm ]] || status=1 ;;
        again) [[ $code == 0 && $output == $'handled\nwent on\nno alarm' ]] || status=1 ;;
    esac
done
exit $status
