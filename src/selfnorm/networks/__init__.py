"""Networks: energies of rows, masked residual networks, features of numbers, ResNet-18."""
