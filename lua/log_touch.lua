#!lua
--[[
log_touch: write a partition's state as it is, so that a WAIT or WAITAOF behind it, on the same connection, covers all
writes of the node so far: also an append that was a repetition, and what other connections wrote.

KEYS
  1 meta_key   hash    state

RETURNS
  {"ok"}       written
  {"absent"}   no such partition on this node: nothing was written
]]
local meta_key = KEYS[1]

local state = redis.call('HGET', meta_key, 'state')
if not state then return {'absent'} end
redis.call('HSET', meta_key, 'state', state)
return {'ok'}
