<?php
// A page as an application makes it: it loads its data, sorts it, and renders a part.
parse_str($_SERVER['QUERY_STRING'] ?? '', $query);
$rows = [];
for ($number = 0; $number < $query['mib'] * 250; $number++) {
    $rows[] = ['id' => $number, 'name' => "name $number", 'text' => str_repeat("the same words in each process $number ", 8)];
}
usort($rows, fn ($one, $other) => strcmp($one['text'], $other['text']));
foreach (array_slice($rows, $query['page'] % 1000, 50) as $row) {
    echo '<p id="', $row['id'], '">', htmlspecialchars($row['name']), ': ', md5($row['text']), "</p>\n";
}
