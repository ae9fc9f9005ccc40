"""A backend of torch with NCCL's rules on the CPU, and the tests that show the rules."""
