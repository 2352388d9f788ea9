"""Modules by the names that torchao.float8 and float8_experimental gave them; aliases only.

`float8` finds them here, so that `from torchao.float8.float8_linear import ...` becomes
`from float8.float8_linear import ...`.
"""
