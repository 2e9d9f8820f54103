#!lua flags=no-writes
--[[
log_ends: tell how far a partition's records and what is known of them go together.

Reads only, in one step, and never tells a record.

KEYS
  1 log_key    stream  the partition's records
  2 meta_key   hash    state, seal id, next offset
  3 marks_key  hash    <source>:<lp> -> highest seq

RETURNS
  {state, seal, next, records, marks, behind, command}
                       '' and 0 where the meta does not say; records: -1 for no stream, else how many; marks: 1 where
                       there are any; behind: the offset behind the last record, 0 for none; command: the seal that the
                       command record at its end names, '' for none
]]
local log_key = KEYS[1]
local meta_key = KEYS[2]
local marks_key = KEYS[3]

local meta = redis.call('HMGET', meta_key, 'state', 'seal', 'next')
local records = redis.call('EXISTS', log_key) == 1 and redis.call('XLEN', log_key) or -1
local last = redis.call('XREVRANGE', log_key, '+', '-', 'COUNT', 1)[1]
local command = last and string.sub(last[1], -2) ~= '-0'
return {
  meta[1] or '', meta[2] or '', tonumber(meta[3] or '0'), command and records - 1 or records, redis.call('EXISTS', marks_key),
  last and tonumber(string.match(last[1], '^%d+')) + 1 or 0, command and last[2][6] or '',
}
