#!/usr/bin/env bash
# Install the course into the Python of an image, of Binder or of Colab: install.sh FOLDER, with the clone's folder.
#
# A PyTorch that is there stays: NVIDIA's images and Colab have one built for their GPUs. It has to be 2.10 or newer; pip says so.
# Without one, uv installs PyTorch's CPU build, and everything comes in the versions of constraints.txt.
set -euo pipefail
cd "${1:?the folder of the clone, such as /course}"

pip() { python3 -m pip install --no-cache-dir "$@"; }
if torch=$(python3 -c 'import torch; print(f"torch=={torch.__version__}")' 2> /dev/null); then
    pip -c <(echo "$torch") -e '.[lab,era5]'
else
    pip -c constraints.txt uv
    python3 -m uv pip install --python "$(command -v python3)" --no-cache --torch-backend=cpu -c constraints.txt torch
    pip -c constraints.txt -e '.[lab,era5,kernels]'
fi
