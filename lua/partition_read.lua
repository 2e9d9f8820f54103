#!lua flags=no-writes
--[[
partition_read: tell what a partition is, how far its marks are, and where its stream begins and ends.

Reads only, in one step, and never tells a record.

KEYS
  1 log_key    stream  the partition's records
  2 meta_key   hash    state, topic, range of LPs, next and first offset, seal
  3 marks_key  hash    <source>:<lp> -> highest seq

RETURNS
  {"partition", {names and values of meta}, {names and values of marks}, length, first id, last id}   '' where the stream is empty
  {"absent"}   no such partition on this node
]]
local log_key = KEYS[1]
local meta_key = KEYS[2]
local marks_key = KEYS[3]

local meta = redis.call('HGETALL', meta_key)
if #meta == 0 then return {'absent'} end
local first = redis.call('XRANGE', log_key, '-', '+', 'COUNT', 1)[1]
local last = redis.call('XREVRANGE', log_key, '+', '-', 'COUNT', 1)[1]
return {
  'partition', meta, redis.call('HGETALL', marks_key), redis.call('XLEN', log_key), first and first[1] or '', last and last[1] or '',
}
