#!/usr/bin/env bash
# Any command on the processes of one node or of several, by torchrun.
#   one node:        bash launch/torchrun.sh train configs/ppo_tiny.yaml [key=value ...]
#   several nodes:   on each, NNODES=2 NODE_RANK=0 MASTER_ADDR=<host of node 0> bash launch/torchrun.sh train CONFIG ...
#
#   NPROC         processes on this node (default: one a GPU, or 1)
#   NNODES        nodes (default 1);  NODE_RANK  this node, from 0;  MASTER_ADDR, MASTER_PORT  where node 0 listens
#
# Several nodes meet by a static rendezvous: NODE_RANK then decides which ranks a node has, and so which tensor and
# pipeline groups stay inside it. The default rendezvous of torchrun does not keep that order.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"
setup_env

nodes="${NNODES:-1}"
processes="${NPROC:-$(command -v nvidia-smi >/dev/null 2>&1 && echo gpu || echo 1)}"
if [[ "$nodes" -eq 1 ]]; then
    where=(--standalone)
else
    where=(--rdzv-backend static --nnodes "$nodes" --node-rank "${NODE_RANK:?the number of this node, from 0}"
           --master-addr "${MASTER_ADDR:?the host of node 0}" --master-port "${MASTER_PORT:-29500}")
fi
exec "$VENV/bin/torchrun" "${where[@]}" --nproc-per-node "$processes" -m hybridflow "$@"
