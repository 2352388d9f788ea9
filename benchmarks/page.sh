#!/usr/bin/env bash
# Measure all that docs/performance.md shows, on two GPUs: bash benchmarks/page.sh FOLDER [NAME ...]
# Each command checks, then times, and writes its file after each variant. `float8 bench tables`
# then writes the page. The names are those of the files; without any, all are measured.
set -u
folder=$1
shift
names=" $* "

measure() { # NAME COMMAND OPTIONS...
    if [[ $names == "  " || $names == *" $1 "* ]]; then
        float8 bench "${@:2}" -o "$folder/$1.json" || echo "$1: failed" >&2
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
measure h200-experts experts --rounds 5

# Two GPUs
measure h200-train-8b train --ranks 2 --recipe $three --peers $peers --rounds 5
measure h200-train-8b-kept train --ranks 2 --recipe tensorwise --checkpointing full,torchtitan,float8 \
    --rounds 3
measure h200-train-8b-microbatches train --ranks 2 --recipe tensorwise --microbatches 16 --rounds 1
measure h200-train-1b-graphed train --ranks 2 --model llama3-1b --seq-len 2048 --mode graphed \
    --recipe tensorwise --peers torchao --rounds 10
measure h200-tp-llama3-70b tp --ranks 2 --recipe tensorwise,rowwise --peers torchao --rounds 6
measure h200-train-mixtral train --ranks 2 --model mixtral --blocks 4 --recipe tensorwise --rounds 6
measure h200-train-olmoe train --ranks 2 --model olmoe --blocks 8 --recipe tensorwise --rounds 6
measure h200-train-qwen3 train --ranks 2 --model qwen3_moe --blocks 4 --recipe tensorwise --rounds 6
