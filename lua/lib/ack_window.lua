-- How far above committed a group may settle: what the ack bitmap spans.
local WINDOW = 1048576
