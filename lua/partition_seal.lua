#!lua flags=allow-oom
--[[
partition_seal: close one partition for a route change, and append the command record as its last one.

The marks are frozen from then on. The command's entry id is that of the last record with 1 behind the dash, so that
offsets of messages stay dense and the command takes none; its field b is the seal id, which names this very command.

Records behind `next`, which a call left that ended in its middle, are counted first. The state comes before the command:
where the call ends between them, the partition is closed, and the next call for this change appends the command. Where
a command was there and was removed, its entry id is used up, and the command gets the next one: 2 behind the dash, up to 9.

KEYS
  1 log_key     stream  the partition's records
  2 meta_key    hash    state, change that sealed it, seal id, next offset
  3 marks_key   hash    <source>:<lp> -> highest seq

ARGV
  1 change      int     the route change
  2 seal        string  a name for this seal that nobody used before
  3 brief       string  "1": say nothing of the marks

RETURNS
  {"sealed", seal, next, {field, seq, ...}}   closed now, or before by this change: then with the seal it got
  {"conflict", state, change}                 not open, and not sealed by this change; nothing was changed
  {"absent"}                                  no such partition on this node, or its records are gone
]]
local log_key = KEYS[1]
local meta_key = KEYS[2]
local marks_key = KEYS[3]
local change = ARGV[1]
local seal = ARGV[2]
local brief = ARGV[3] == '1'

-- include recount_tail

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'sealed_for', 'seal')
local state, next_offset = meta[1], meta[2]
if not state then return {'absent'} end
if state ~= 'open' and not (state == 'sealed' and meta[3] == change) then return {'conflict', state, meta[3] or ''} end
if next_offset ~= '1' and redis.call('EXISTS', log_key) == 0 then return {'absent'} end
local last = redis.call('XREVRANGE', log_key, '+', '-', 'COUNT', 1)[1]
-- Return the error where there is one.
local function put_command(name)
  local added
  for part = 1, 9 do
    local id = string.format('%d-%d', tonumber(next_offset) - 1, part)
    added = redis.pcall('XADD', log_key, id, 'm', 'command', 'k', change, 'b', name)
    if type(added) ~= 'table' or not added.err then return nil end
    if not string.find(added.err, 'equal or smaller', 1, true) then return added end
  end
  return added
end
if state == 'sealed' then
  local failed = (not last or string.sub(last[1], -2) == '-0') and put_command(meta[4])
  if failed then return failed end
  return {'sealed', meta[4], tonumber(next_offset), brief and {} or redis.call('HGETALL', marks_key)}
end
if last and tonumber(string.match(last[1], '^%d+')) >= tonumber(next_offset) then
  next_offset = recount_tail(log_key, meta_key, marks_key, tonumber(next_offset), 500)
end
redis.call('HSET', meta_key, 'state', 'sealed', 'sealed_for', change, 'seal', seal)
local failed = put_command(seal)
if failed then return failed end
return {'sealed', seal, tonumber(next_offset), brief and {} or redis.call('HGETALL', marks_key)}
