"""What is typed: the commands of learners (`inferlab lab`, `progress`) and of instructors (`inferlab grade`)."""
