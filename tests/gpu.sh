# What each part of `make gpu` begins with. The Makefile sources it, in bash, with PART and PY;
# OUT and CPU are what was typed.
#
# All that a part makes lies in log/gpu/PART. PART.tar.gz has it without the checkpoints, in OUT or
# in benchmarks/DEVICE. It is written again after each step, and every ten seconds of a long one,
# because who lends a GPU may take it back at any moment.

export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/.wheels/installed:$PWD:$PYTHONPATH
device=CPU
test "$CPU" || device=$($PY -c 'import re, torch; print(re.sub(r"\W+", "-", torch.cuda.get_device_name()))') || {
    echo "make $PART: there is no GPU here; make $PART CPU=1 tries it out, small, on the CPU"
    exit 1
}
left=log/gpu/$PART
out=${OUT:-${CPU:+log/gpu}}
out=${out:-benchmarks/$device}
rm -rf "$left"
mkdir -p "$left" "$out"
test ! -d .wheels || $PY -m pip install -q --no-index --no-deps --upgrade --target .wheels/installed .wheels/*.whl
{
    date
    git describe --always --dirty
    $PY -c 'import sys, torch; print(f"Python {sys.version}\nPyTorch {torch.__version__}")'
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv || cat /proc/driver/nvidia/version
} > "$left/versions.txt" 2>&1

archive() {
    tar -czf "$out/$PART.tmp" --exclude '*ckpt_*' -C log/gpu "$PART" 2> /dev/null
    mv "$out/$PART.tmp" "$out/$PART.tar.gz"
    archived=$SECONDS
}

step() {  # step SECONDS NAME COMMAND...: NAME.log gets what it prints; a failure stops no other step
    # KILL_AT=FOLDER: it is killed as soon as it has made this, and that is no failure
    local seconds=$1 name=$2 killed= code
    local log=$left/$name.log
    shift 2
    echo "> $*" | tee "$log"
    timeout -k 5 "$seconds" "$@" >> "$log" 2>&1 &  # it leads a process group
    child=$!
    tail -f -s 0.1 -n +2 --pid=$child "$log" &
    while kill -0 $child 2> /dev/null; do
        test ! -d "$KILL_AT" || { kill -KILL -$child && killed=$KILL_AT; }
        test $((SECONDS - archived)) -lt 10 || archive
        sleep 0.05
    done
    wait $child
    code=$?
    wait  # for tail
    if test "$killed"; then
        code=0
    elif test "$KILL_AT"; then
        code="$code before it made $KILL_AT"
    fi
    if test "$code" != 0; then
        echo "FAILED with $code: $*" | tee -a "$log"
        failed+=" $name"
    fi
    archive
}

finish() {
    echo "make $PART: $out/$PART.tar.gz has what $left has, without checkpoints"
    test -z "$failed" || { echo "make $PART: failed:$failed" && exit 1; }
}

failed=
trap archive EXIT
trap 'kill $child; archive; wait $child; exit 143' TERM INT HUP
archive
