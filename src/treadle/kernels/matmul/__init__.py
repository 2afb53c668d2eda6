"""Products with weights: gemm, gemv, their tile loops, and the choice among them."""
