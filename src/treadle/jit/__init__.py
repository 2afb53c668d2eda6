"""The kernel compiler: Python functions to LLVM IR to machine code. The only package that uses
LLVM.

::

    types.py         Ty: scalars with a sign, vectors, pointers
    values.py        Val and Var: values and variables, and their operators
    builder.py       Builder: loops, conditions, memory and vectors (the kernel language)
    spaces.py        the builder's part for address spaces and atomic operations
    sharing.py       threads that share a work item, as the builder sees them
    math.py          exp, sigmoid, tanh, silu, gelu ...
    language.py      names for annotations, without loading the compiler
    coroutine.py     functions that suspend and are resumed
    ir.py            LLVM IR as text
    compile.py       LLVM IR to objects, and LLVM's linker
    elf.py           a faster loader of objects, for x86-64 Linux
    cache.py         compiled kernels on disk
    compile_pool.py  kernels compiled by several processes at once
    kernel.py        a spec's address: cached, or traced, compiled and linked
    host.py          the features of this CPU
"""
