def test_ranks_start(torchrun):
    says = ["sh", "-c", "echo $RANK of $WORLD_SIZE"]
    finished = torchrun.run(*says, ranks=2, options=("--no-python",))
    assert finished.returncode == 0
    assert finished.lines == ["0 of 2", "1 of 2"]
