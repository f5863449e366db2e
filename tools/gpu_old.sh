#!/usr/bin/env bash
# On a machine with a GPU and no network: an old torch with CUDA out of packed parts, and gpu.py --old with it.
#
#   gpu_old.sh [--cpu] FOLDER... [-- ARGUMENTS OF gpu.py]
#
# Each folder has files *.part*, and unpack.sh and perhaps smoke.py beside them. Parts may come in several calls, each
# with the folders that have arrived; the call after which all parts are there runs the cases. OUT is the folder of the
# results (results/), OLD_TORCH the one that is unpacked to (/tmp/old-torch, a name of its own for each torch), and
# SECONDS_LEFT what all may take (540). Every step has a time limit, and a step that fails ends nothing but itself.
set -u
cd "$(dirname "$0")/.." || exit 2
out=$(realpath -m "${OUT:-results}")
dest=${OLD_TORCH:-/tmp/old-torch}
python=${PYTHON:-python3}
end=$((SECONDS + ${SECONDS_LEFT:-540}))
device=cuda smoke_options=() folders=()
while [ $# -gt 0 ]; do
    case $1 in
    --cpu) device=cpu smoke_options=(--cpu) ;;
    --) shift; break ;;
    *) folders+=("$1") ;;
    esac
    shift
done
if [ ${#folders[@]} -eq 0 ]; then
    sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' "$0"
    exit 2
fi
mkdir -p "$out"

# step NAME SECONDS COMMAND...: into NAME.log and onto the screen; its end and its seconds into steps.txt.
step() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [ $((end - SECONDS)) -lt "$limit" ] && limit=$((end - SECONDS))
    if [ "$limit" -lt 5 ]; then
        echo "$name: not run, no time left" | tee -a "$out/steps.txt"
        return 1
    fi
    timeout --kill-after 5 "$limit" "$@" 2>&1 | tee "$out/$name.log"
    code=${PIPESTATUS[0]}
    echo "$name: exit code $code after $((SECONDS - began)) s" | tee -a "$out/steps.txt"
    return "$code"
}

failed=0 smoke=
for folder in "${folders[@]}"; do
    step "unpack-$(basename "$folder" | tr -d .)" 120 bash "$folder/unpack.sh" "$folder" "$dest" "$python" || failed=1
    [ -f "$folder/smoke.py" ] && smoke=$folder/smoke.py
done
if [ ! -f "$dest/env.sh" ]; then
    echo "not all parts are there yet: $dest has no env.sh" | tee -a "$out/steps.txt"
    exit "$failed"
fi
# It sets PY; LD_LIBRARY_PATH may be unset before.
# shellcheck disable=SC1091
. "$dest/env.sh"
export PYTHONPATH=$PWD
[ "$device" = cuda ] && step nvidia-smi 20 nvidia-smi
if [ -n "$smoke" ]; then
    step smoke 120 "$PY" "$smoke" ${smoke_options[@]+"${smoke_options[@]}"} || failed=1
    # It ends well also where a step of it has failed.
    grep -q "^== .*: FAILED" "$out/smoke.log" && failed=1
fi
version=$("$PY" -c 'import importlib.metadata as m; print(m.version("torch").replace("+", "-"))' || echo unknown)
left=$((end - SECONDS - 15))
[ "$left" -gt 360 ] && left=360
step "gpu-$version" $((left + 15)) "$PY" tools/gpu.py --old --device "$device" --seconds "$left" \
    --json "$out/gpu-$version.json" "$@" || failed=1
exit "$failed"
