"""The one table of tolerances: lower bounds of the SQNR in dB, the same on CPU and GPU.

What is not listed here is compared bitwise.
"""

# A cast and back, normally distributed data: half a step of 3 and of 2 mantissa bits.
CAST_E4M3 = 30.0
CAST_E5M2 = 24.0

# One float8 linear layer against high precision.
LINEAR_OUTPUT = 18.0
LINEAR_GRAD_WEIGHT = 17.0
LINEAR_GRAD_INPUT = 17.0

# A float8 feed-forward network against high precision: output and all gradients.
FFN = 20.0

# The gradients of a small Llama: the errors of all its layers come together in those of its norms.
MODEL = 14.0

# A float8 GEMM against float32 or float64 on the same operands: rounding of a bf16 result, and
# the few accumulator bits of the tensor cores.
GEMM = 45.0

# Inductor, told to round to bfloat16 where eager mode does, against eager mode. The two differ in
# the last bits of a sigmoid or a sum, which moves very few elements of a cast to the neighbouring
# float8 value.
COMPILED = 35.0

# The same GEMM in float32, its sums in another order.
HIGH_PRECISION = 100.0
