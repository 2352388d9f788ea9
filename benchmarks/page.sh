#!/usr/bin/env bash
# Measure what docs/performance.md shows: bash benchmarks/page.sh FOLDER [NAME ...]
#
# On a host with two H200 (files are named so), with `float8`, torchao, transformers and peft
# installed; about 35 minutes. Each command checks, then times, and writes FOLDER/NAME.json after
# each variant. Without names all are measured. It goes on after a command that fails, and ends with
# status 1. Copy complete files to benchmarks/results; `float8 bench tables` writes the tables of
# the page from there, numbers in its text are written by hand.
set -u
folder=${1:?"usage: bash benchmarks/page.sh FOLDER [NAME ...]"}
shift
wanted=("$@")
known=()
failed=()

measure() { # NAME COMMAND OPTIONS...
    known+=("$1")
    if ((${#wanted[@]})) && [[ " ${wanted[*]} " != *" $1 "* ]]; then
        return
    fi
    float8 bench "${@:2}" -o "$folder/$1.json"
    local status=$?
    if ((status == 130)); then # interrupted
        exit 130
    elif ((status)); then
        failed+=("$1")
    fi
}

peers=torchao,torchao+auto_filter
three=tensorwise,rowwise,blockwise

# One GPU
measure h200-kernels-8b model --mode compiled --recipe $three --peers $peers --rounds 9
measure h200-eager-8b model --mode eager --recipe $three,delayed --peers torchao --rounds 7
measure h200-activations-8b model --mode compiled --recipe $three --checkpointing float8 --rounds 7
measure h200-profile-8b profile --recipe $three
measure h200-block-70b model --model llama3-70b --blocks 1 --mode compiled \
    --recipe tensorwise,rowwise --peers torchao --rounds 8
measure h200-train-1b train --model llama3-1b --ranks 1 --recipe $three,tensorwise+head \
    --peers $peers --rounds 8
measure h200-train-lora train --model llama --lora --recipe tensorwise,tensorwise+only --rounds 4
measure h200-experts experts # for docs/experts.md

# Two GPUs
measure h200-train-8b train --ranks 2 --recipe $three --peers $peers --rounds 5
measure h200-train-8b-kept train --ranks 2 --recipe tensorwise --rounds 3 \
    --checkpointing full,torchtitan,float8
measure h200-train-8b-microbatches train --ranks 2 --recipe tensorwise --microbatches 16 --rounds 1
measure h200-train-1b-graphed train --ranks 2 --model llama3-1b --seq-len 2048 --mode graphed \
    --recipe tensorwise --peers torchao --rounds 10
measure h200-tp-llama3-70b tp --ranks 2 --recipe tensorwise,rowwise --peers torchao --rounds 6
measure h200-train-mixtral train --ranks 2 --model mixtral --blocks 4 --recipe tensorwise --rounds 6
measure h200-train-olmoe train --ranks 2 --model olmoe --blocks 8 --recipe tensorwise --rounds 6
measure h200-train-qwen3 train --ranks 2 --model qwen3_moe --blocks 4 --recipe tensorwise --rounds 6

for name in "${wanted[@]}"; do
    if [[ " ${known[*]} " != *" $name "* ]]; then
        echo "page.sh: got the name $name, expected one of ${known[*]}" >&2
        failed+=("$name")
    fi
done
if ((${#failed[@]})); then
    echo "page.sh: failed: ${failed[*]}" >&2
    exit 1
fi
