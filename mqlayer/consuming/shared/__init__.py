"""Shared consumption: all members of a group read all partitions, without order, on native consumer groups.

A message is *new* -> *in hand* of one member -> *settled*; or *in hand* -> *back*, due at a time (it failed, was given
back at a stop, or its member was not heard of for the group's visibility timeout) -> *in hand* again. When its attempts
run out it is *dead* in Postgres first, and settled then. Who dies when:

- after a read, or while it handles: what it has is due again after the visibility timeout, whichever member or scan
  looks.
  Whoever gets it starts it with care: an attempt is counted before, in case that message ends its process.
- after handling, before settling: it is handled again; the fence takes a second effect away.
- between a message's death in Postgres and its settlement: whoever gets it asks Postgres first, and settles it.
- it is stopped, and wakes late: what others handled it neither repeats in Postgres (the fence) nor writes off, since
  it waits for its node's word that a message is its own.
- with a claim of what was given back from Postgres: it is due after the visibility timeout; the next claim is with
  care.
- around a node's restart: no call of before passes, the epoch is another one; what was in hand comes again.
"""
