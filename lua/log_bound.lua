#!lua flags=no-writes
--[[
log_bound: tell up to where the records of a partition are beyond the limits of its topic.

Reads only. It goes from the first record to the first one that is within all limits, never past a group that counts.

KEYS
  1 meta_key    hash    state, next and first offset of the partition
  2 log_key     stream  the partition's records
  3 ...         per group that counts: its lock hash

ARGV
  1 floor       int     never tell an offset above this one
  2 age_ms      int     records that were published longer ago are beyond; 0: no limit
  3 now_ms      int     the time by Postgres; the earlier of its and the node's counts
  4 bytes       int     the oldest records of a larger stream are beyond; 0: no limit
  5 messages    int     records with so many newer ones are beyond; 0: no limit
  6 ...         per group: how often it was sent elsewhere, and the offset at which it starts since

RETURNS
  {"bound", offset, m, weighed}   the first record within limits; m: facts of the one before it, '' for none; weighed: 0
                                  where the node does not tell the size of a stream
  {"absent"}                      no such partition on this node
]]
local meta_key = KEYS[1]
local log_key = KEYS[2]
local floor = tonumber(ARGV[1])
local age_ms = tonumber(ARGV[2])
local now_ms = tonumber(ARGV[3])
local bytes = tonumber(ARGV[4])
local messages = tonumber(ARGV[5])
local format, min, max = string.format, math.min, math.max

local LOOK_LIMIT = 5000
local SEEN_LIMIT = 8000000
local PIECE_BYTES = 500000

local meta = redis.call('HMGET', meta_key, 'state', 'next', 'first')
if not meta[1] or meta[1] == 'deleted' then return {'absent'} end
local next_offset = tonumber(meta[2])
floor = min(floor, next_offset)
for i = 3, #KEYS do
  local lock = redis.call('HMGET', KEYS[i], 'committed', 'seek')
  local seek, start = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local begun = lock[1] and tonumber(lock[2] or '0') >= seek
  floor = min(floor, begun and tonumber(lock[1]) or start)
end
local function record_at(offset)
  local id = format('%d-0', offset)
  local entry = redis.call('XRANGE', log_key, id, id)[1]
  return entry and entry[2]
end

local beyond, weighed = messages > 0 and next_offset - messages or 0, 1
local head = redis.call('XRANGE', log_key, '-', '+', 'COUNT', 1)[1]
local at = head and tonumber(string.match(head[1], '^%d+')) or next_offset
if bytes > 0 then
  local size = redis.pcall('MEMORY', 'USAGE', log_key)
  -- By the mean size of its records: the stream is measured again at the next call.
  if type(size) == 'number' then
    if size > bytes then beyond = max(beyond, at + math.ceil((size - bytes) / size * (next_offset - at))) end
  elseif size then
    weighed = 0
  end
end
local time = redis.call('TIME')
local node_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local cutoff = age_ms > 0 and min(now_ms, node_ms) - age_ms or 0

at = max(at, min(beyond, floor))
local looked, seen, piece, within = 0, 0, 16, age_ms == 0
while not within and at < floor and looked < LOOK_LIMIT and seen < SEEN_LIMIT do
  local wanted = min(piece, LOOK_LIMIT - looked)
  local part = redis.call('XRANGE', log_key, format('%d-0', at), format('%d-0', floor - 1), 'COUNT', wanted)
  if #part == 0 then break end
  for _, entry in ipairs(part) do
    local fields = entry[2]
    local at_ms = tonumber(string.match(fields[2], '^%d+:%d+:%d+:(%d+)'))
    if not at_ms or at_ms >= cutoff then
      within = true
      break
    end
    looked, seen, at = looked + 1, seen + #fields[6], tonumber(string.match(entry[1], '^%d+')) + 1
  end
  piece = max(1, min(128, math.floor(PIECE_BYTES * looked / max(1, seen))))
end
local before = record_at(at - 1)
return {'bound', at, before and before[2] or '', weighed}
