"""The model on a GPU with our Triton kernels, in as few launches as its products allow."""
