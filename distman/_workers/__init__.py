"""Processes that are forked by a server of their own and never outlive the program.

The program (``server_process.py``) starts a supervisor, the supervisor a fork server, and the server forks workers on
request (``fork_server.py``). What a worker does is up to its user: an *entry*, the text ``"package.module:function"``,
names a context manager that is entered once in the server and yields the function that every worker calls. Nothing here
imports torch, so that a program can start workers without loading it.
"""
