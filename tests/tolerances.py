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

# A float8 GEMM against float32 or float64 on the same operands: rounding of a bf16 result, and
# the few accumulator bits of the tensor cores.
GEMM = 45.0

# Inductor against eager mode, float32. The two differ in the last bits of a sigmoid or a sum, which
# moves very few elements of a cast to the neighbouring float8 value.
COMPILED = 35.0

# The same in bfloat16: Inductor keeps what eager mode rounds to bfloat16 in float32, so that amaxes
# and casts see values up to 2**-9 apart, which moves about 1 % of the elements. Two casts that have
# nothing to do with each other are 25 dB apart.
COMPILED_LOW = 28.0
