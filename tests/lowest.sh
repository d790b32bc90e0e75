#!/bin/sh
# The tests with the lowest version of every dependency that pyproject.toml allows.
#
#   sh tests/lowest.sh                      all quick tests
#   sh tests/lowest.sh tests/study          some of them
#
# A second environment, build/lowest, holds the lowest versions and what they need; torch and the
# tools of development come from .venv, behind them. torch's own lowest version is a download of
# gigabytes with CUDA: add it with TORCH=torch==2.11.0.
set -eu
cd "$(dirname "$0")/.."
here=build/lowest
[ -x $here/bin/python ] || .venv/bin/python -m venv $here
.venv/bin/python -m tests.lowest > $here/lowest.txt
grep -v '^torch' $here/lowest.txt > $here/small.txt
grep '^torchdiffeq' $here/lowest.txt > $here/with-torch.txt
$here/bin/python -m pip install --quiet --disable-pip-version-check -r $here/small.txt
$here/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $here/with-torch.txt
# With its libraries: torch built for CUDA does not load without them.
[ -z "${TORCH:-}" ] || $here/bin/python -m pip install --quiet --disable-pip-version-check "$TORCH"
packages='import sysconfig; print(sysconfig.get_path("purelib"))'
.venv/bin/python -c "$packages" > "$($here/bin/python -c "$packages")/behind.pth"
$here/bin/python -m tests.lowest --check
# The newer platformdirs of .venv brings a plugin for pytest that the older one does not have.
exec $here/bin/python -m pytest -q -p no:platformdirs "$@"
