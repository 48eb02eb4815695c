#!/usr/bin/env bash
# Tests the CUDA kernels on interpreted PTX: run.sh [--arch 75|90|120] [--adverse] [PYTEST OPTIONS]
#
#   --arch      of the kernels (default: 90)
#   --adverse   with warps, lanes and approximations as adverse as CUDA allows, on sm_90
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
tests="ptx90 and not adverse"
while [ $# -gt 0 ]; do
    case $1 in
    --arch) tests="ptx${2:?--arch: got nothing, expected 75, 90 or 120} and not adverse" && shift ;;
    --adverse) tests=adverse ;;
    *) break ;;
    esac
    shift
done
exec "${PYTEST:-pytest}" -q -m "" -k "$tests" tests/ptx "$@"
