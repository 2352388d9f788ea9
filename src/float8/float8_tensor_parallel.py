"""The styles of tensor parallel, in the module of torchao that has them."""

from float8.parallel.tensor import Float8ColwiseParallel as Float8ColwiseParallel
from float8.parallel.tensor import Float8RowwiseParallel as Float8RowwiseParallel
from float8.parallel.tensor import PrepareFloat8ModuleInput as PrepareFloat8ModuleInput
