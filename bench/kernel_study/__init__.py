"""Small kernels measured for their own sake: the RISC-V work's, swept, counted and timed."""
