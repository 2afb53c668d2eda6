"""The kernel compiler: Python functions to LLVM IR to machine code. The only package that uses
LLVM.
"""
