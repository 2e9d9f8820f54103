#!lua flags=no-writes
--[[
log_search: tell the first messages of a few records of a partition that have a key, or whose facts have a text.

Reads only, and never tells a body. Facts are compared as text: whoever reads compares the header.

KEYS
  1 log_key   stream  the partition's records

ARGV
  1 first     int     look from this offset on
  2 past      int     and below this one
  3 count     int     at so many records, 1 to 1000, and at no more once 4 MB of bodies are seen
  4 limit     int     return so many messages, 1 or more
  5 begins    string  only messages whose facts begin so: <source>:<lp>:, or <source>:<lp>:<seq>:; '': any
  6 contains  string  only messages whose facts contain this text; '': any
  7 keyed     int     1: only messages of the key
  8 key       string  the key

RETURNS
  {"searched", next, {offset, m, key, ...}}   next: the first offset that was not looked at
]]
local log_key = KEYS[1]
local first = tonumber(ARGV[1])
local past = tonumber(ARGV[2])
local count = tonumber(ARGV[3])
local limit = tonumber(ARGV[4])
local begins = ARGV[5]
local contains = ARGV[6]
local keyed = tonumber(ARGV[7])
local key = ARGV[8]
local call, format, find, sub = redis.call, string.format, string.find, string.sub

if count < 1 or count > 1000 or limit < 1 then return redis.error_reply('ERR log_search: 1 to 1000 records, some room') end
local SEEN_LIMIT = 4000000
local PIECE_BYTES = 500000

local ahead, found = first, {}
local scanned, seen, piece = 0, 0, 16
while scanned < count and ahead < past do
  local wanted = math.min(piece, count - scanned)
  local part = call('XRANGE', log_key, format('%d-0', ahead), format('(%d-0', past), 'COUNT', wanted)
  for i = 1, #part do
    local id, fields = part[i][1], part[i][2]
    -- The command record of a sealed partition is no message.
    if sub(id, -2) ~= '-0' then return {'searched', past, found} end
    local offset, m = tonumber(sub(id, 1, -3)), fields[2]
    scanned, seen, ahead = scanned + 1, seen + #fields[6], offset + 1
    if (keyed ~= 1 or fields[4] == key) and sub(m, 1, #begins) == begins
       and (contains == '' or find(m, contains, 1, true)) then
      local n = #found
      found[n + 1], found[n + 2], found[n + 3] = offset, m, fields[4]
      if n + 3 >= 3 * limit then return {'searched', ahead, found} end
    end
  end
  if #part < wanted then return {'searched', past, found} end
  if seen >= SEEN_LIMIT then break end
  piece = math.max(1, math.min(128, math.floor(PIECE_BYTES * scanned / math.max(1, seen))))
end
return {'searched', ahead, found}
