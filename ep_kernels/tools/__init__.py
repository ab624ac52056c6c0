"""Programs for those who change the kernels. Nothing imports them."""
