"""Tools for those who build the kernels; nothing that runs imports them."""
