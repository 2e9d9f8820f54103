#!lua flags=no-writes
--[[
log_chain: tell which stretches of chains some records of a partition are, and where they break.

Reads only, and never tells a key or a body.

KEYS
  1 log_key  stream  the partition's records

ARGV
  1 first    int     look from this offset on
  2 past     int     and below this one
  3 count    int     at so many records at most, 1 to 1000

RETURNS
  {last, {name, first seq, last seq, ...}, {offset, name, seq before, seq, ...}}
                     last: the last offset that was looked at, 0 for none; a stretch per chain, its name is
                     <source>:<lp>; records whose seq does not follow the one before them in these
]]
local log_key = KEYS[1]
local first = tonumber(ARGV[1])
local past = tonumber(ARGV[2])
local count = tonumber(ARGV[3])

local from, to = string.format('%d-0', first), string.format('(%d-0', past)
local last, at, stretches, breaks = 0, {}, {}, {}
for _, entry in ipairs(redis.call('XRANGE', log_key, from, to, 'COUNT', count)) do
  local offset, part = string.match(entry[1], '^(%d+)-(%d+)$')
  if part == '0' then
    last = tonumber(offset)
    local name, seq = string.match(entry[2][2], '^(%d+:%d+):(%d+):')
    seq = tonumber(seq)
    local place = at[name]
    if not place then
      place = #stretches + 1
      at[name] = place
      stretches[place], stretches[place + 1], stretches[place + 2] = name, seq, seq
    else
      if seq ~= stretches[place + 2] + 1 then
        local n = #breaks
        breaks[n + 1], breaks[n + 2], breaks[n + 3], breaks[n + 4] = last, name, stretches[place + 2], seq
      end
      stretches[place + 2] = seq
    end
  end
end
return {last, stretches, breaks}
