#!lua flags=no-writes
--[[
marks_read: tell a partition's state and some of its marks, of one moment.

Reads only, and in one step: of a partition that is gone, or not opened yet, marks say nothing. A script, since a
transaction is refused while memory is full, and this has to be told then too.

KEYS
  1 meta_key    hash    state
  2 marks_key   hash    <source>:<lp> -> highest seq

ARGV
  1 ...         string  fields of marks, at least one

RETURNS
  {state, {seq, ...}}   '' for no such partition; per field its mark, or nothing
]]
local meta_key = KEYS[1]
local marks_key = KEYS[2]

return {redis.call('HGET', meta_key, 'state') or '', redis.call('HMGET', marks_key, unpack(ARGV))}
