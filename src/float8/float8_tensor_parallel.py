"""The styles of tensor parallel, under the module name that torchao has for them."""

from float8.parallel.tensor import Float8ColwiseParallel as Float8ColwiseParallel
from float8.parallel.tensor import Float8RowwiseParallel as Float8RowwiseParallel
from float8.parallel.tensor import PrepareFloat8ModuleInput as PrepareFloat8ModuleInput
