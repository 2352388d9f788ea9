"""Reference models: the Llama that the trainer trains and the benchmarks time."""
