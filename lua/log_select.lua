#!lua flags=no-writes
--[[
log_select: read the messages of one partition that have a group's tags, and say which offsets hold others.

Bodies of other messages stay here. Tags are compared by hash: a few others may come along, and whoever reads compares
the names. A message's hashes stand before the colon of its header mq-tags, eight hex digits each. A header whose name
ends as that one does is looked at too, so nothing that matches is missed.

KEYS
  1 log_key       stream  the partition's records

ARGV
  1 after         int     read what comes behind this offset
  2 max_scanned   int     look at so many records, 1 to 1000
  3 limit         int     return so many messages, 1 or more
  4 bytes         int     return no more once so many bytes of bodies are found, and look at none once 4 MB are seen
  5 match         string  any: one of the hashes is enough; all: each must be there
  6 ...           string  hashes, one or more

RETURNS
  {"selected", last, more, {first, last, ...}, {entry, ...}}
      last: the last offset that was looked at, `after` where nothing is behind it; more: 1 where there may be more
      behind it; ranges of offsets that do not match; then matching entries in order, the command record as the last
]]
local log_key = KEYS[1]
local after = tonumber(ARGV[1])
local max_scanned = tonumber(ARGV[2])
local limit = tonumber(ARGV[3])
local bytes = tonumber(ARGV[4])
local match = ARGV[5]
local call, format, argv, find = redis.call, string.format, ARGV, string.find

if max_scanned < 1 or max_scanned > 1000 or limit < 1 then return redis.error_reply('ERR log_select: 1 to 1000 looks, some room') end
local SEEN_LIMIT = 4000000
local PIECE_BYTES = 500000

local function matches(m)
  for hashes in string.gmatch(m, 'mq%-tags": ?"(%x+):') do
    local found = 0
    for i = 6, #argv do
      if find(hashes, argv[i], 1, true) then found = found + 1 end
    end
    if found == #argv - 5 or (found > 0 and match == 'any') then return true end
  end
  return false
end

local last, ranges, entries = after, {}, {}
local scanned, seen, size, piece = 0, 0, 0, 16
while scanned < max_scanned do
  local wanted = math.min(piece, max_scanned - scanned)
  -- The id of the command record, should it be next: all messages behind `last` come after that.
  local part = call('XRANGE', log_key, format('%d-1', last), '+', 'COUNT', wanted)
  for i = 1, #part do
    local entry = part[i]
    local id, fields = entry[1], entry[2]
    if string.sub(id, -2) ~= '-0' then
      entries[#entries + 1] = entry
      return {'selected', last, 0, ranges, entries}
    end
    local offset = tonumber(string.sub(id, 1, -3))
    scanned = scanned + 1
    seen = seen + #fields[6]
    if matches(fields[2]) then
      entries[#entries + 1] = entry
      size = size + #fields[6]
    elseif #ranges > 0 and ranges[#ranges] == offset - 1 then
      ranges[#ranges] = offset
    else
      ranges[#ranges + 1] = offset
      ranges[#ranges + 1] = offset
    end
    last = offset
    if #entries >= limit or size >= bytes then return {'selected', last, 1, ranges, entries} end
  end
  if #part < wanted then return {'selected', last, 0, ranges, entries} end
  if seen >= SEEN_LIMIT then break end
  piece = math.max(1, math.min(128, math.floor(PIECE_BYTES * scanned / math.max(1, seen))))
end
return {'selected', last, 1, ranges, entries}
