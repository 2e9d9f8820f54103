-- protocol 2
-- Every living process says its topics by now. Code of protocol 1, which does not, is refused before it adds a row.
DELETE FROM mqlayer.process WHERE topics IS NULL AND lease_until < now();
ALTER TABLE mqlayer.process ALTER COLUMN topics SET DEFAULT '{}', ALTER COLUMN topics SET NOT NULL;
