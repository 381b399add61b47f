# The next fifteen minutes of a GPU, in two commands:
#
#   bash tests/second.sh one            is it right, what is fastest, where does the time go: 235 s
#   bash tests/second.sh two SECONDS    a 124M from nothing on books, as long as SECONDS allow
#
# The tree has .books/ (parts of the text: train*.jsonl.bz2, val.jsonl.bz2), .wheels/ (make wheels)
# and data/nanoGPT (a clone). OUT gets an archive after each command, and at any end.
# CPU=1: small sizes on the CPU, to try both out. PY: the Python.

export PYTHONUNBUFFERED=1 PYTHONPATH=$PWD/.wheels/installed:$PWD:$PYTHONPATH
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-/tmp/inductor}
export PY=${PY:-python3}
left=log/second
mkdir -p $left data "$OUT"
# at the end of a command, where it takes the place of what stands before
bench= small= slower=1
if test "$CPU"; then
    bench="--device cpu --no-compile --model tiny --sequence-length 32 --batch-size 2"
    small="--device cpu --no-compile --n-layer 2 --n-head 2 --n-embd 32 --sequence-length 32
        --batch-size 8 --total-batch-size 256 --max-steps 12 --val-tokens 2048"
    slower=5
fi
quiet="--hellaswag-every 0 --overwrite"

say() {
    echo "[$SECONDS s] $*" | tee -a $left/clock.log
}

limit() {  # limit SECONDS NAME COMMAND...: NAME.log gets what it prints
    local seconds=$1 name=$2 code
    shift 2
    say "$name begins"
    timeout -k 20 $((seconds * slower)) "$@" > "$left/$name.log" 2>&1
    code=$?
    say "$name ends: $code"
    tail -n 12 "$left/$name.log"
    return $code
}

archive() {
    tar -czf "$OUT/$1.tar.gz" --exclude 'ckpt_*' log data/books/manifest.json 2> /dev/null
}

unpack() {  # the text: a process for each part, then tokens, while the GPU is tested
    mkdir -p text
    ls .books/*.bz2 | xargs -P 16 -I{} sh -c '$PY -c "import bz2, sys; sys.stdout.buffer.write(bz2.open(sys.argv[1]).read())" {} > text/$(basename {} .bz2)'
    $PY fineweb.py --source 'text/train*.jsonl' --val-source text/val.jsonl --data-dir data/books
}

one() {
    test ! -d .wheels || $PY -m pip install -q --no-index --no-deps --upgrade --target .wheels/installed .wheels/*.whl
    { nvidia-smi; nproc; $PY -c 'import torch; print(torch.__version__, torch.backends.cudnn.version())'; } > $left/versions.log 2>&1
    unpack > $left/tokens.log 2>&1 &
    limit 60 tests $PY -m pytest -q -n 4 -p no:cacheprovider tests/test_cuda.py -k "graph or nothing_recompiles or muon or (bit_for_bit and 1)" || echo 'export GPT2_NO_GRAPH=1' > $left/choice.graph
    . $left/choice.graph 2> /dev/null
    limit 75 ab64 $PY tests/ab.py 64 graph: mix0:TORCHINDUCTOR_MIX_ORDER_REDUCTION=0 coord:TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 kernel:GPT2_LOSS_KERNEL=1 nanogpt:
    limit 60 ab16 $PY tests/ab.py 16 graph16: eager16:GPT2_NO_GRAPH=1 fast16:TORCHINDUCTOR_USE_FAST_MATH=1 lt16:TORCH_BLAS_PREFER_CUBLASLT=1 nanogpt16:
    . $left/choice-64 2> /dev/null
    limit 30 kernels64 $PY tests/profile_step.py --batch-size 64 $bench
    limit 20 kernels16 $PY tests/profile_step.py --batch-size 16 $bench
    wait
    tail -n 3 $left/tokens.log
    limit 25 small $PY train_gpt2.py --data-dir data/books --log-dir $left/small --n-layer 4 --n-head 6 --n-embd 384 --sequence-length 512 --total-batch-size 4096 --optimizer muon --max-steps 300 --val-every 0 --sample-every 0 --checkpoint-every 0 $quiet $small
    limit 40 one_gpu $PY -m pytest -q -n 3 -p no:cacheprovider tests/test_cuda.py -k one_gpu
    archive one
}

two() {
    . $left/choice-64 2> /dev/null
    . $left/choice.graph 2> /dev/null
    # 100 s: the start, evaluations, what follows; 4 ms: Muon
    steps=$($PY -c "print(max(12, int(($1 - 100) * 1000 / (${BEST_MS:-125} + 4))))")
    say "$steps updates"
    limit $(($1 - 45)) run $PY train_gpt2.py --data-dir data/books --log-dir log/books \
        --batch-size 64 --total-batch-size 65536 --max-steps $steps --optimizer muon --learning-rate 1.4e-3 \
        --embedding-lr 4 --decay linear --min-lr-frac 0 --weight-decay 0.83 \
        --val-every $((steps / 12)) --val-tokens 1048576 --sample-every $((steps / 4)) \
        --sample-prompt "It was a dark and stormy night" --sample-tokens 64 --num-samples 4 \
        --checkpoint-every $steps --checkpoint-minutes 3 $quiet $small
    limit 18 samples $PY sample.py --model "$(ls -d log/books/ckpt_* | tail -1)" --prompt "The old house" --max-new-tokens 200 --num-samples 4
    archive two
}

trap 'archive last' EXIT
"$@"
