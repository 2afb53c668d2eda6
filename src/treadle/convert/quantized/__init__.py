"""Quantised checkpoints: weights become ggml blocks with the same numbers if there are such blocks,
else floats; MLX's affine formats are also run as they are.

::

    checkpoint.py          finds the tensors of each packed matrix, by the quantisation method
    float_formats.py       8-bit and 4-bit floats, lookup tables
    integer_formats.py     integers with scales and zero points
    mlx.py                 MLX's formats
    unpack.py              arrays of codes and scales to blocks or floats
    dequantized_tensor.py  DequantizedTensor: a matrix computed when it is read
"""
