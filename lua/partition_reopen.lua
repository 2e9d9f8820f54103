#!lua
--[[
partition_reopen: take a seal back that nobody recorded, where the partition lacks what its outbox can send again.

For repairing only, in one MULTI with the log_append that continues the chain of `field` and the partition_seal behind it,
whose entry id is then higher than that of the command which is taken back. The first two ask for memory, so neither
goes without the other. Whoever comes late finds another seal or another mark, and changes nothing.

The command goes before the seal: where the call ends between them, the partition stays closed without its command, and
partition_seal for the same change appends that again.

KEYS
  1 log_key     stream  the partition's records
  2 meta_key    hash    state, seal id
  3 marks_key   hash    <source>:<lp> -> highest seq

ARGV
  1 seal        string  the seal that the caller saw
  2 field       string  <source>:<lp> that is short
  3 mark        int     its highest seq, as the caller saw it

RETURNS
  {"open"}              open again, and the command is gone
  {"conflict", state}   sealed otherwise by now, or not short any more; nothing was changed
  {"absent"}            no such partition on this node
]]
local log_key = KEYS[1]
local meta_key = KEYS[2]
local marks_key = KEYS[3]
local seal = ARGV[1]
local field = ARGV[2]
local mark = tonumber(ARGV[3])

local meta = redis.call('HMGET', meta_key, 'state', 'seal')
local state = meta[1]
if not state then return {'absent'} end
local there = tonumber(redis.call('HGET', marks_key, field) or 0)
if state ~= 'sealed' or meta[2] ~= seal or there ~= mark then return {'conflict', state} end
local last = redis.call('XREVRANGE', log_key, '+', '-', 'COUNT', 1)[1]
local is_command = last and last[2][2] == 'command'
if is_command and last[2][6] ~= seal then return {'conflict', state} end
-- What needs memory comes first: older servers refuse only a script's first write. Nothing is changed by it.
redis.call('HSET', meta_key, 'seal', seal)
if is_command then redis.call('XDEL', log_key, last[1]) end
redis.call('HSET', meta_key, 'state', 'open')
redis.call('HDEL', meta_key, 'sealed_for', 'seal')
return {'open'}
