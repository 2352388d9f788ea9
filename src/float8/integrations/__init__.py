"""What other libraries need that they cannot do by themselves; one module for each.

`float8` imports none of these: a module of this folder imports the library it is for.
"""
