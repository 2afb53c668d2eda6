"""From Python functions to machine code; the only part that knows LLVM."""
