#!/usr/bin/env bash
# The main job on four CPU ranks, from nothing: set up, tokenizer and warm start, then PPO.
#   bash launch/quickstart.sh [key=value ...]      the keys are those of configs/ppo_tiny.yaml
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
setup_env

export CUDA_VISIBLE_DEVICES=   # four ranks on any machine, also one with a single GPU
"$VENV/bin/python" -m hybridflow sft configs/sft_tiny.yaml
"$VENV/bin/torchrun" --standalone --nproc-per-node 4 -m hybridflow train configs/ppo_tiny.yaml "$@"
