#!/bin/bash
# mlflow 3.17.2: an infinite metric comes back from a database as the largest finite float; a NaN comes back as it was.
#
# A loss of inf is expected to be read as inf, all the more as NaN is kept. The SQL store, since mlflow 3 the usual one, cuts
# infinities off at 1.797e308 without a word. Seen: isfinite() is true for a metric logged as inf, so a watch for diverged
# runs, or a filter before means over runs, lets them through. Way round: log a metric of its own, such as loss_is_finite.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1
cat >"$folder/program.py" <<'P'
import math
import sys
import mlflow

mlflow.set_tracking_uri("sqlite:///metrics.db")
with mlflow.start_run() as run:
    for name, value in {"inf": math.inf, "minus_inf": -math.inf, "nan": math.nan}.items():
        mlflow.log_metric(name, value, step=1)
client = mlflow.MlflowClient()
back = {name: client.get_metric_history(run.info.run_id, name)[0].value for name in ("inf", "minus_inf", "nan")}
print(f"mlflow {mlflow.__version__}, read back: {back}")
largest = sys.float_info.max
sys.exit(not (back["inf"] == largest and back["minus_inf"] == -largest and math.isnan(back["nan"])))
P
cd "$folder"
MLFLOW_DISABLE_TELEMETRY=true GIT_PYTHON_REFRESH=quiet "$folder/venv/bin/python" -W ignore program.py 2>errors || { cat errors; exit 1; }
