-- Say whether the ack bitmap is not the one that the lock tells of. The bit of the last settled offset, top - 1, is set, so
-- its length says so: it was removed, or a call ended between the two.
local function bitmap_lost(length, committed, base, top)
  return top > committed and length ~= math.floor((top - 1 - base) / 8) + 1
end
