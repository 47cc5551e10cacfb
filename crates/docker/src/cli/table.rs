//! Rows for people, or in a form they choose.

use serde_json::Value;

use super::{Failure, say};
use crate::template::Template;

/// The default columns of a list: headings and the fields below them.
pub type Columns = &'static [(&'static str, &'static str)];

/// Prints rows by a template; `table …` adds headings and aligns, none is the default columns.
pub fn show(
    rows: &[Value],
    format: Option<&str>,
    columns: Columns,
    headings: &[(&str, &str)],
) -> Result<(), Failure> {
    match format {
        Some("json") => show_plain(rows, "{{json .}}"),
        Some(format) => match format.strip_prefix("table ") {
            Some(template) => show_table(rows, &template.replace("\\t", "\t"), headings),
            None => show_plain(rows, &format.replace("\\t", "\t").replace("\\n", "\n")),
        },
        None => {
            let template =
                columns.iter().map(|(_, field)| format!("{{{{.{field}}}}}")).collect::<Vec<_>>().join("\t");
            let headings: Vec<(&str, &str)> = columns.iter().map(|(title, field)| (*field, *title)).collect();
            show_table(rows, &template, &headings)
        }
    }
}

fn show_plain(rows: &[Value], template: &str) -> Result<(), Failure> {
    let template = Template::parse(template)?;
    for row in rows {
        say(&template.render(row)?)?;
    }
    Ok(())
}

fn show_table(rows: &[Value], text: &str, headings: &[(&str, &str)]) -> Result<(), Failure> {
    let template = Template::parse(text)?;
    let titles: serde_json::Map<String, Value> =
        headings.iter().map(|(field, title)| ((*field).to_owned(), Value::from(*title))).collect();
    let mut lines = vec![template.render(&Value::Object(titles)).unwrap_or_else(|_| text.to_owned())];
    for row in rows {
        lines.push(template.render(row)?);
    }
    for line in align(&lines) {
        say(&line)?;
    }
    Ok(())
}

/// Columns are parted by tabs, and three spaces apart at least.
pub fn align(lines: &[String]) -> Vec<String> {
    let rows: Vec<Vec<&str>> = lines.iter().map(|line| line.split('\t').collect()).collect();
    let count = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..count)
        .map(|column| {
            rows.iter().filter_map(|row| row.get(column)).map(|c| c.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let line = |row: &Vec<&str>| {
        let cells = row.iter().enumerate().map(|(column, cell)| {
            if column + 1 == row.len() {
                (*cell).to_owned()
            } else {
                format!("{cell:<width$}", width = widths[column] + 3)
            }
        });
        cells.collect::<String>().trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let lines = ["ID\tNAME".to_owned(), "abcdef\tx".to_owned()];
        assert_eq!(align(&lines), ["ID       NAME", "abcdef   x"]);
    }
}
